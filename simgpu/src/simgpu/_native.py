"""The compiled runtime. Importing this module registers the device with torch."""

from typing import Any

import torch

from simgpu._build import load_native

torch.utils.rename_privateuse1_backend("simgpu")  # before the library, whose registrations use the name
native: Any = load_native()
