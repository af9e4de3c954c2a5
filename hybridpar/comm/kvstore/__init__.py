"""The KVStore face: MXNet's key-value store on the engine, with or without MXNet."""
