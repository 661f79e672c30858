"""confpred inside PyTorch; importing this package imports PyTorch.

networks    network -> backend -> rewrite -> run; explain, plan, status
calls       eager, linear_chain -> run
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from confpred.errors import MissingExtra

if find_spec("torch") is None:
    raise MissingExtra("torch", "gpu")

if level := os.environ.get("CONFPRED_LOG"):
    from confpred.pytorch.status import verbose

    verbose(level)
