import threading

ended = threading.Event()
work = group.all_reduce("sum", 1, async_op=True)
work.add_done_callback(lambda work: ended.set())
print(ended.wait(10))  # True
