"""Operators as the target device runs them, and the memory inside their kernels.

One folder a device (:mod:`.cpu`, :mod:`.cuda`), one file or folder a family of operators; what
differs from fake tensors on every device is in :mod:`.common`. Each registers with a
:class:`~fxmem.kernels.registry.Backend`.
"""

from __future__ import annotations

from fxmem.kernels import common, registry

registry.import_modules(common)
