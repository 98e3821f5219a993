"""What an evaluation leaves: records, where they lie, how they are compared and shown."""
