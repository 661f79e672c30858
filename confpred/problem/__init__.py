"""What is asked: a problem, of an operation, for a device."""
