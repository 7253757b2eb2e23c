import torch
from torch.nn.parallel import DistributedDataParallel

import collectived as cd
from collectived.integrations.torch import allreduce_hook

with cd.connect() as session, session.join() as group:
    torch.distributed.init_process_group("gloo")  # DDP hands out the first weights by it
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model.register_comm_hook(None, allreduce_hook(group, cd.CommunicationOptions(timeout_seconds=60)))
    model(torch.full((2, 4), float(group.rank))).sum().backward()
    print(model.module.weight.grad.tolist())  # [[1.0, 1.0, 1.0, 1.0]]
    torch.distributed.destroy_process_group()
