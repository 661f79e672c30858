"""The input of a prediction: a problem of an operation, and a device."""
