"""All campaigns, in the order in which they run."""

from types import ModuleType

from tests.campaigns import arguments, generations, kills, malformed

CAMPAIGNS: tuple[ModuleType, ...] = (malformed, generations, arguments, kills)
