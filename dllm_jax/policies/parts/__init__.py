"""What several policies share, and what one of them has split off."""
