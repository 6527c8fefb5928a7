"""Rollouts from SGLang servers over HTTP: requests, faults, weights and the servers themselves."""
