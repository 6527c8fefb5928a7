"""Rollouts from servers over HTTP: requests, faults, weights and the servers themselves."""
