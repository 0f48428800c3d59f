"""The cards that the virtual clock can play. Peak figures from the makers' data sheets; see docs/design/simgpu.md."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the clock's roofline model knows of a card."""

    name: str
    fp32_tflops: float
    """Without TF32."""
    bf16_tflops: float
    """Dense, with 32-bit accumulation; fp32 speed where the card has no bf16 units."""
    fp16_tflops: float
    memory_gbps: float
    link_gbps: float
    """From and to pinned host memory, one direction; what is commonly reached, not the bus's peak."""
    pageable_link_gbps: float
    """The same for host memory that is not pinned."""
    copy_engines: int
    """2: both directions at once. 1: they take turns."""
    launch_us: float = 4.0
    """Host time to launch one kernel or copy."""


CARDS = {
    card.name: card
    for card in (
        Card(
            name="RTX 3090",
            fp32_tflops=35.6,
            bf16_tflops=71.0,
            fp16_tflops=71.0,
            memory_gbps=936.0,
            link_gbps=25.0,
            pageable_link_gbps=8.0,
            copy_engines=2,
        ),
        Card(
            name="RTX 4090",
            fp32_tflops=82.6,
            bf16_tflops=165.2,
            fp16_tflops=165.2,
            memory_gbps=1008.0,
            link_gbps=25.0,
            pageable_link_gbps=8.0,
            copy_engines=2,
        ),
        Card(
            name="A100",
            fp32_tflops=19.5,
            bf16_tflops=312.0,
            fp16_tflops=312.0,
            memory_gbps=1555.0,
            link_gbps=25.0,
            pageable_link_gbps=8.0,
            copy_engines=2,
        ),
        Card(
            name="T4",
            fp32_tflops=8.1,
            bf16_tflops=8.1,
            fp16_tflops=65.0,
            memory_gbps=320.0,
            link_gbps=12.0,
            pageable_link_gbps=6.0,
            copy_engines=2,
        ),
    )
}
