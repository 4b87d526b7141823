"""The cost models behind every prediction: one small file each."""
