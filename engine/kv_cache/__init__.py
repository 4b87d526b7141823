"""KV memory of a worker. Which blocks: block_pool.py over radix_tree.py (prefix cache) and eviction.py; how many:
pool_size.py; the bytes: tensors.py; memory that grows and shrinks: elastic_*.py, paged_free_list.py."""
