"""Training and judging models. The only part of the library that needs pandas or pyarrow."""
