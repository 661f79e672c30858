"""Hook for schemathesis: it sends any bytes where the description names Parquet."""

from __future__ import annotations

import schemathesis

from confpred.service.schema import PARQUET

schemathesis.serializer.alias(PARQUET, "application/octet-stream")
