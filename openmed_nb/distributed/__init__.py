"""Annotating on a Dask cluster: who takes part, how texts go out and answers come back, and how a cluster is started."""
