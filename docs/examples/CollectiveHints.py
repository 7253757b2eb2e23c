import warnings

import collectived as cd

with warnings.catch_warnings(record=True) as told:
    hints = cd.CollectiveHints(bytes_per_pack=50 << 20)
print(told[0].message)  # CollectiveHints is deprecated: use CommunicationOptions
print(hints == cd.CommunicationOptions(bytes_per_pack=50 << 20))  # True

with cd.connect() as session, session.join() as group:
    print(group.all_reduce("sum", 1, experimental_hints=hints))  # 2
