"""Questions: a problem, of an operation, for a device."""
