"""The offline sampler: measures configs on GPUs, into Parquet files."""
