import numpy as np

from collectived import mpi as MPI

comm = MPI.COMM_WORLD
total = np.empty(2)
comm.Allreduce(np.full(2, comm.rank + 1.0), total, op=MPI.SUM)
print(comm.Get_rank(), comm.Get_size(), total)  # 0 2 [3. 3.]

other = np.empty(1, int)
requests = [comm.Isend(np.full(1, comm.rank), dest=1 - comm.rank), comm.Irecv(other, source=MPI.ANY_SOURCE)]
MPI.Request.Waitall(requests)
print(other)  # [1]
