"""Stand-ins for packages whose kernels are compiled for a GPU: one file a package.

``pip install ./examples/library_plugin``; every analysis then lets code import them.
"""

from __future__ import annotations

import fxmem
from fxmem_libraries import apex, torch_scatter


def register() -> None:
    """Called once, when a command starts or a step is first analysed."""
    fxmem.register_stand_in("torch_scatter", torch_scatter.NAMES, version="2.1.2")
    fxmem.register_stand_in("apex.normalization", apex.NORMALIZATION, version="25.09")
    fxmem.register_stand_in("apex.optimizers", apex.OPTIMIZERS, version="25.09")
