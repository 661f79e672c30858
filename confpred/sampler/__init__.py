"""The offline sampler: measures configs on GPUs and writes Parquet files."""
