"""Binary units of memory and disk space, in bytes."""

MIB, GIB = 2**20, 2**30
