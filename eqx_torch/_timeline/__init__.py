from .calls import Overlap as Overlap, TorchCall as TorchCall
from .recording import ACTIVE as ACTIVE, Span as Span
from .timelines import Timeline as Timeline, timeline as timeline
