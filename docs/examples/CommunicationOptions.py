options = cd.CommunicationOptions(bytes_per_pack=50 << 20, timeout_seconds=120)
print(options.implementation.value)  # AUTO

ring = options.merge(cd.CommunicationOptions(implementation="ring"))
print(ring.timeout_seconds, ring.implementation.value)  # 120.0 RING

no_limit = options.merge(cd.CommunicationOptions(timeout_seconds=0))  # 0 says "none", None says nothing
print(no_limit.timeout_seconds)  # 0.0
