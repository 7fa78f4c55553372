"""The command `jaxdist verify`: nothing that was trained is lost before its use."""
