"""Memory for the metadata of millions of blocks: `metadata.c` and its Python twin, behind `base`."""
