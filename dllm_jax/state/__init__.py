"""What a generation is before anybody decides anything: geometry, canvas, computed positions, storage."""
