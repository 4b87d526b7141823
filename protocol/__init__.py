"""What all processes share: types (request.py, kv_blocks.py, errors.py), process/, rpc/, membership/. Imports no other
package."""
