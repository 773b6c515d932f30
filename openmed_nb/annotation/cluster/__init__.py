"""Annotating on a Dask cluster: who takes part, how texts go out and answers come back, and how a cluster is started.

Queues, retries and restarts are Dask's. What runs on a worker stands in ``openmed_nb.session.worker``: it needs a session.
"""
