"""The parameter server: protocol, update rules, center variable, server and client.

Needs the standard library, numpy and ml_dtypes only; neither Spark nor Keras is imported from here.
"""

if __name__ != "distkeras.ps":
    raise ImportError(f"this folder imports as 'distkeras.ps'. Received: import of {__name__!r}")
