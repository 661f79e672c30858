"""Files of data: suites of problems, and measurements of them."""
