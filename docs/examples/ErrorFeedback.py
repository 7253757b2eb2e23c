feedback = cd.ErrorFeedback("int8")
grads = {"w": np.full(1000, 0.5, np.float32), "b": np.full(3, 1e-6, np.float32)}
grads["w"][0] = 100.0  # beside this one 0.5 is rounded to 0.7874016
steps = [feedback.compensate(grads)["w"][1] for _ in range(300)]
print(round(float(np.mean(steps)), 2))  # 0.5
options = cd.CommunicationOptions(compression="int8")
print(group.all_reduce("sum", feedback.compensate(grads), options)["w"].shape)  # (1000,)
