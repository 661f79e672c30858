"""What is written to files: suites of problems, and measurements of them."""
