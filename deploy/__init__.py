"""Starts and operates clusters: launcher/ (moonserve serve), ray/, admin/ (commands on a running cluster), diagnostics/
(doctor, profile), and files for docker, kubernetes, systemd, monitoring."""
