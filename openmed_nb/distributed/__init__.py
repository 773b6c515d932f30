"""Annotation on a Dask cluster: workers, distribution of texts, collection of results, and cluster startup."""
