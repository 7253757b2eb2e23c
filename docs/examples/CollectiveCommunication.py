print(cd.CollectiveCommunication is cd.CommunicationImplementation)  # True
