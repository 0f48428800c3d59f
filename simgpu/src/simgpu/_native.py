"""The compiled runtime. Importing this module registers the device with torch."""

from typing import Any

from torch.utils.backend_registration import rename_privateuse1_backend

from simgpu._build import load_native

rename_privateuse1_backend("simgpu")  # before the library, whose registrations use the name
native: Any = load_native()
