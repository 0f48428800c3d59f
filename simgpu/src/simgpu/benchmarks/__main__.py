"""`python -m simgpu.benchmarks NAME`. Each benchmark prints a table, and exits with 1 if its bar is missed."""

import argparse
import sys


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simgpu.benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    published = commands.add_parser("published", help="peaks of four training steps against a published RTX 3090 table")
    published.add_argument("models", nargs="*", help="which of the four (default: all)")
    published.add_argument("--unpadded", action="store_true", help="a batch without padding, hence without a mask")
    commands.add_parser("speed", help="time of a training step against the plain CPU")
    commands.add_parser("build", help="time of a clean build with two jobs")
    opinfo = commands.add_parser("opinfo", help="every operator of torch's OpInfo database against the CPU")
    opinfo.add_argument("--only", help="operators whose name contains this")
    worker = commands.add_parser("published-worker")
    worker.add_argument("model")
    worker.add_argument("--unpadded", action="store_true")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    match arguments.benchmark:
        case "published":
            from simgpu.benchmarks import published

            return published.main(arguments.models, padded=not arguments.unpadded)
        case "published-worker":
            from simgpu.benchmarks import published

            return published.worker(arguments.model, padded=not arguments.unpadded)
        case "speed":
            from simgpu.benchmarks import speed

            return speed.main()
        case "build":
            from simgpu.benchmarks import build

            return build.main()
        case _:
            from simgpu.benchmarks import opinfo

            return opinfo.main(arguments.only)


if __name__ == "__main__":
    sys.exit(main())
