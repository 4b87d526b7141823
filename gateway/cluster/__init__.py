"""The gateway's view of conductor and workers: client (cluster_client.py), lost workers (failure_detection.py,
avoided_instances.py), metrics of requests and of all processes."""
