"""All campaigns, in the order in which they run."""

from types import ModuleType

from tests.campaigns import kills, malformed

CAMPAIGNS: tuple[ModuleType, ...] = (malformed, kills)
