import collectived as cd

print(cd.integrations.__all__)  # ['ray', 'torch']
