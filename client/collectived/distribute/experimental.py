"""The names of tf.distribute.experimental."""

from collectived_proto.options import CollectiveHints, CommunicationOptions
from collectived_proto.types import CommunicationImplementation

CollectiveCommunication = CommunicationImplementation

__all__ = ["CollectiveCommunication", "CollectiveHints", "CommunicationImplementation", "CommunicationOptions"]
