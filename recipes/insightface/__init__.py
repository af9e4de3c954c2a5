"""Identity recognition (faces, characters, products): a replicated backbone and a class-sharded margin head."""
