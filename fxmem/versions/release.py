"""The installed release of torch, and ranges of releases."""

from __future__ import annotations

import functools
import warnings

import torch

from fxmem.errors import FxmemError, FxmemWarning

Release = tuple[int, int]

OLDEST: Release = (2, 6)
"""The oldest release that is tested, and that fxmem runs on."""
NEWEST: Release = (2, 14)
"""The newest release that is tested; later ones are taken to be like it."""


def parse_release(version: str) -> Release:
    """Returns the release that a version of torch belongs to.

    >>> parse_release("2.13.0+cpu"), parse_release("2.6.0a0+git1234")
    ((2, 13), (2, 6))
    """
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


INSTALLED = parse_release(torch.__version__)


def write_release(release: Release) -> str:
    """Writes a release as torch does.

    >>> write_release((2, 13))
    '2.13'
    """
    return ".".join(map(str, release))


def is_release(since: Release | None = None, before: Release | None = None) -> bool:
    """Returns whether the installed release lies in a range.

    Args:
        since: The first release of the range.
        before: The first release after the range.

    >>> is_release(since=(2, 6)), is_release(before=(2, 6))
    (True, False)
    """
    return (since is None or since <= INSTALLED) and (before is None or before > INSTALLED)


@functools.cache
def check_release() -> None:
    """Refuses a release that is too old, and warns once of one that is newer than any tested.

    Raises:
        FxmemError: On a release before :data:`OLDEST`.
    """
    oldest, newest = write_release(OLDEST), write_release(NEWEST)
    if INSTALLED < OLDEST:
        raise FxmemError(
            f"fxmem needs torch {oldest} or later, and {torch.__version__} is installed",
            hint=f"pip install 'torch>={oldest}'",
        )
    if INSTALLED > NEWEST:
        warnings.warn(
            f"torch {torch.__version__} is newer than {newest}, the newest release that fxmem was"
            f" tested with; what {newest} does is taken to hold",
            FxmemWarning,
            stacklevel=2,
        )
