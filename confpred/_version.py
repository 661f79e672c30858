"""The version, which modules read without importing the package's top."""

__version__ = "0.2.0"
