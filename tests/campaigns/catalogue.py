"""All campaigns, in the order in which they run."""

from types import ModuleType

CAMPAIGNS: tuple[ModuleType, ...] = ()
