"""Settings that pyproject.toml cannot hold: an index's page, and where a build puts its files."""

import re
import tempfile
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
BUILD = tempfile.TemporaryDirectory(prefix="confpred-build-")  # no build/ beside the sources

setup(
    # Links to files of the repository lead nowhere else.
    long_description=re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", README),
    long_description_content_type="text/markdown",
    options={"build": {"build_base": BUILD.name}},
)
