"""The version of Perfuse: the package's, and part of every cache key."""

VERSION = "0.1.0"
