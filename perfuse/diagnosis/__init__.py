"""A machine -> a report of what works on it, what is missing, and how to fix it.

Probes come in, each bounded in time, and a report goes out as data, text or JSON. Nothing here
changes a setting, installs anything or raises: a probe that fails is a row of the report.
"""
