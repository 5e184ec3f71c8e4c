"""Planning an all-reduce: topology, copy trees, packs, cost. Pure Python, without TensorFlow."""
