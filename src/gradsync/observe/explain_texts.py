"""What the page of ``gradsync explain`` says, in English and in Chinese; trusted HTML with places for values.

Knows no numbers: those come from a run, escaped, through ``explain_page``. Both languages have the same keys.
"""

TEXTS: dict[str, dict[str, str]] = {
    "en": {
        "title": "Inside data-parallel training",
        "lead": "{nproc} processes trained <b>{model}</b> ({num_parameters} parameters in {num_tensors} tensors) for "
        "{steps} steps on this machine. Every number on this page was measured in that run.",
        "verdict_title": "In one sentence",
        "processes_title": "Processes and their group",
        "processes": "Data-parallel training runs the same program {nproc} times. Each copy, called a <i>rank</i>, is a "
        "process of its own: it has its own memory, its own copy of the model and its own share of the data.",
        "group": "The ranks found each other through a small key-value store and formed a <i>process group</i> on the "
        "backend <code>{backend}</code>. A group has one rule: what it does together (a <i>collective</i>, such as "
        "all-reduce), every rank must call, in the same order. The engine uses these groups:",
        "rank": "rank",
        "pid": "process id",
        "host": "host",
        "threads": "threads",
        "broadcast_title": "The same start: broadcast",
        "broadcast_differ": "Each rank built the model for itself, with a random seed of its own, so the copies "
        "differed. Wrapping the model in <code>DistributedDataParallel</code> first compared names, shapes and types "
        "of all {num_tensors} parameters across the ranks, and then sent rank 0's values to everyone: a "
        "<i>broadcast</i>. Look at one value, <code>{shown}</code>:",
        "broadcast_same": "Each rank built the model for itself; this one came out equal everywhere, because its "
        "builder fixes the random seed. <code>DistributedDataParallel</code> does not rely on that: it compared names, "
        "shapes and types of all {num_tensors} parameters across the ranks, and sent rank 0's values to everyone, a "
        "<i>broadcast</i>. Look at one value, <code>{shown}</code>:",
        "value_built": "as built",
        "value_wrapped": "after wrapping",
        "checksum_built": "checksum of all, as built",
        "checksum_wrapped": "checksum after wrapping",
        "buckets_title": "Buckets: which gradient goes where",
        "buckets": "A message has a fixed price, however short it is. So the {num_tensors} gradients do not travel "
        "one by one but in {num_buckets} <i>buckets</i>: flat pieces of memory in which the gradients of several "
        "parameters lie side by side. Backward computes gradients from the last layer to the first, and the buckets "
        "are filled in that order, so that the first one can leave while backward still works on the others.",
        "cap_small": "Buckets were limited to {cap} in this run, so that there is more than one to look at. The default "
        "is 1 MiB for the first and a tenth of the model, from 1 to 25 MiB, for the others.",
        "cap_default": "Buckets have the default limits: 1 MiB for the first, so that communication starts early, and "
        "a tenth of the model, from 1 to 25 MiB, for the others.",
        "map": "Each bar is one bucket, as long as its bytes, and each piece of it one parameter:",
        "table_of_places": "All parameters and their places",
        "parameter": "parameter",
        "bucket": "bucket",
        "size": "bytes",
        "first_byte": "from byte",
        "time_title": "One step in time: hooks and launches",
        "first_pass": "Every parameter has a <i>hook</i> that autograd calls when its gradient is there. In the very "
        "first pass nothing is known yet, not even which gradients will come, so nothing could leave early: all "
        "buckets were launched at the end of backward.",
        "later_pass": "By pass {number} the engine had learned what to expect. In the drawing, a tick is a gradient "
        "arriving at its hook; a dot says that a bucket is complete; the bar below is its all-reduce on the way. What "
        "happens while the rank computes is <i>hidden</i>, and costs no time; the end of a bar is <i>exposed</i> for as "
        "long as the rank did nothing but wait for it. The last bucket always leaves at the end, since its gradients come last.",
        "order": "On rank 0 <code>{first}</code> was the first gradient to arrive, {first_at} into backward, and "
        "<code>{last}</code> the last, at {last_at}. {early} of {num_buckets} buckets left before backward was over.",
        "reduce_title": "All-reduce: from {nproc} gradients to one",
        "reduce": "Follow one number through pass {number}: the gradient of <code>{shown}</code>. Each rank computed it "
        "from its own batch, so each got another value. All-reduce adds them up over the ranks and hands everyone the "
        "result; each rank had divided its own by {nproc} before, so the sum is the mean:",
        "own_gradient": "its own gradient",
        "after_reduce": "<code>p.grad</code> after backward",
        "sum_check": "({terms}) / {nproc} = {mean}. The same number would come out of one process that had the whole "
        "batch: the mean over all samples is the mean of the ranks' means.",
        "write_title": "Write-back: where the result lies",
        "write": "When a bucket has arrived, nothing is copied out of it: <code>p.grad</code> of each parameter "
        "<i>is</i> its place in the bucket. The gradient of <code>{name}</code> lies in bucket {bucket}, from byte "
        "{offset} on. In the next pass the same memory is used again, unless somebody still holds the gradient.",
        "equal_title": "Equal replicas",
        "equal": "Equal parameters, equal gradients, equal steps: so the copies stay equal, without ever being sent "
        "again. After {steps} steps the checksums of all parameters were:",
        "checksum_end": "checksum at the end",
        "is_equal": "They are equal on all ranks, bit for bit.",
        "is_different": "They are <b>not</b> equal: something changed a parameter on one rank alone. "
        "<code>ddp.verify_replicas()</code> names it.",
        "losses": "The losses are not equal, since each rank sees its own data: {losses} in the last step.",
        "no_sync_title": "Not every backward has to talk: no_sync",
        "no_sync": "To save communication one can add up the gradients of several backwards and average only once. "
        "Here one backward ran inside <code>with ddp.no_sync():</code> and one outside. The first launched {num_passes} "
        "collectives and left each rank with its own gradient; the second averaged the sum of both:",
        "first_backward": "after no_sync",
        "second_backward": "second backward alone",
        "no_sync_result": "after it, on this rank",
        "unused_title": "A parameter that is not used",
        "unused": "The model now got two parameters more. <code>{lonely}</code> is used on rank 0 only; "
        "<code>{spare}</code> nowhere. Behind the gradients of the last bucket travel a few <i>control words</i>, in "
        "which each rank says what it used. So afterwards every rank knows: <code>{lonely}</code> was used by "
        "{lonely_used} of {nproc} ranks, and those without it count as zeros; <code>{spare}</code> was used by "
        "{spare_used} of them, so its gradient stays what it was, <code>None</code>. No flag is needed, and nobody hangs.",
        "where_title": "Where the time goes",
        "where": "What a rank needs by itself between two passes, in the median of the last {num_passes}: waiting for "
        "data, forward and loss, backward up to its last own gradient, the optimizer. The ranks wait for each other in "
        "every pass, so the slowest sets the pace.",
        "late": "Rank {rank} needs {delay} more than the others, most of it in the phase “{phase}”. Nothing in the "
        "engine can win that back; look at what this rank does there.",
        "not_late": "No rank holds the others up by much.",
        "exposed_much": "Of a step of {step} the rank waited for {exposed}. To bring that down: larger batches or "
        "<code>no_sync</code> (fewer passes for the same samples), <code>gradsync.bf16_compress_hook</code> (half the "
        "bytes), a faster backend (<code>shm</code> on one host, NCCL on GPUs), or another "
        "<code>bucket_cap_mb</code>.",
        "exposed_little": "Of a step of {step} the rank waited for {exposed}: there is little to win from faster "
        "communication here.",
        "made": "Written by <code>{command}</code>, gradsync {version}, torch {torch}.",
        "phase_data": "data",
        "phase_forward": "forward",
        "phase_backward": "backward",
        "phase_optimizer": "optimizer",
        "verdict_hidden": "{hidden} of {total} communication hidden",
        "verdict_bucket": "bucket {bucket}, {share} of the exposed time, holds {name}",
        "verdict_late": "rank {rank} is late by {delay} in {phase}",
    },
    "zh": {
        "title": "数据并行训练的内部",
        "lead": "{nproc} 个进程在这台机器上训练了 <b>{model}</b>（{num_tensors} 个张量，共 {num_parameters} 个参数）"
        "{steps} 步。本页的每个数字都是这次运行中实测的。",
        "verdict_title": "一句话结论",
        "processes_title": "进程与进程组",
        "processes": "数据并行就是把同一个程序运行 {nproc} 份。每一份叫一个 <i>rank</i>，是独立的进程："
        "有自己的内存、自己的一份模型、自己的一份数据。",
        "group": "各 rank 先通过一个小小的键值存储找到彼此，再用后端 <code>{backend}</code> 组成<i>进程组</i>。"
        "进程组只有一条规矩：一起做的事（<i>集合通信</i>，例如 all-reduce）每个 rank 都必须调用，而且顺序相同。"
        "引擎用到了这些组：",
        "rank": "rank",
        "pid": "进程号",
        "host": "主机",
        "threads": "线程数",
        "broadcast_title": "相同的起点：broadcast",
        "broadcast_differ": "每个 rank 各自构建了模型，随机种子各不相同，所以初始值不一样。"
        "用 <code>DistributedDataParallel</code> 包装时，先在各 rank 之间核对全部 {num_tensors} 个参数的名字、形状和类型，"
        "再把 rank 0 的值发给所有人，这就是 <i>broadcast</i>（广播）。看其中一个值 <code>{shown}</code>：",
        "broadcast_same": "每个 rank 各自构建了模型；构建函数固定了随机种子，所以这次各处恰好相同。"
        "<code>DistributedDataParallel</code> 并不依赖这一点：它先在各 rank 之间核对全部 {num_tensors} 个参数的名字、"
        "形状和类型，再把 rank 0 的值发给所有人，这就是 <i>broadcast</i>（广播）。看其中一个值 <code>{shown}</code>：",
        "value_built": "构建时",
        "value_wrapped": "包装后",
        "checksum_built": "全部参数的校验和，构建时",
        "checksum_wrapped": "校验和，包装后",
        "buckets_title": "桶：哪个梯度放在哪里",
        "buckets": "一条消息再短也有固定开销，所以 {num_tensors} 个梯度不是一个个发送，而是装进 {num_buckets} 个<i>桶</i>："
        "桶是一段连续内存，里面依次放着若干参数的梯度。反向传播从最后一层算到第一层，桶也按这个顺序装，"
        "这样第一个桶装满就能先走，而反向还在算其余的部分。",
        "cap_small": "这次运行把桶的上限设为 {cap}，好让我们看到不止一个桶。默认上限是：第一个 1 MiB，其余为模型的十分之一（1 到 25 MiB 之间）。",
        "cap_default": "桶用的是默认上限：第一个 1 MiB，让通信尽早开始；其余为模型的十分之一（1 到 25 MiB 之间）。",
        "map": "每一条是一个桶，长度与字节数成正比；条上的每一段是一个参数：",
        "table_of_places": "全部参数及其位置",
        "parameter": "参数",
        "bucket": "桶",
        "size": "字节数",
        "first_byte": "起始字节",
        "time_title": "一步之内的时间：钩子与发出",
        "first_pass": "每个参数上都有一个<i>钩子</i>，梯度算好时 autograd 就会调用它。第一次同步时还什么都不知道，"
        "连哪些梯度会来都不知道，所以没有桶能提前走：全部在反向结束时才发出。",
        "later_pass": "到第 {number} 次同步，引擎已经学会该等什么。图中每条短竖线是一个梯度到达钩子；圆点表示一个桶已装满；"
        "下面的色条是它的 all-reduce 正在路上。进程还在计算时，通信被<i>掩盖</i>，不花额外时间；"
        "进程除了等它什么也不做的那段时间，就是色条末尾<i>暴露</i>在外的部分。最后一个桶总在反向结束时发出，因为它的梯度来得最晚。",
        "order": "在 rank 0 上，最先到达的梯度是 <code>{first}</code>（反向开始后 {first_at}），"
        "最后是 <code>{last}</code>（{last_at}）。{num_buckets} 个桶中有 {early} 个在反向结束前就已发出。",
        "reduce_title": "All-reduce：{nproc} 个梯度变成一个",
        "reduce": "跟着一个数字走完第 {number} 次同步：<code>{shown}</code> 的梯度。每个 rank 用自己的一批数据计算，所以各不相同。"
        "all-reduce 把各 rank 的值相加，并把结果交给每一个 rank；每个 rank 事先已把自己的值除以 {nproc}，所以和就是平均值：",
        "own_gradient": "自己的梯度",
        "after_reduce": "反向之后的 <code>p.grad</code>",
        "sum_check": "({terms}) / {nproc} = {mean}。单个进程处理整批数据也会得到同一个数：全部样本的平均，就是各 rank 平均值的平均。",
        "write_title": "写回：结果放在哪里",
        "write": "桶到齐之后不再复制任何东西：每个参数的 <code>p.grad</code> <i>就是</i>它在桶里的那一段。"
        "<code>{name}</code> 的梯度在桶 {bucket} 中，从第 {offset} 字节开始。下一次同步重用同一块内存，"
        "除非还有人拿着这个梯度。",
        "equal_title": "副本始终相同",
        "equal": "参数相同、梯度相同、更新相同，所以各份模型一直相同，再也不必重新发送。{steps} 步之后，全部参数的校验和是：",
        "checksum_end": "最后的校验和",
        "is_equal": "所有 rank 逐位相同。",
        "is_different": "它们<b>不</b>相同：有什么东西只在某个 rank 上改动了参数。<code>ddp.verify_replicas()</code> 会指出是哪一个。",
        "losses": "损失并不相同，因为每个 rank 看到的数据不同：最后一步分别是 {losses}。",
        "no_sync_title": "不必每次反向都通信：no_sync",
        "no_sync": "为了节省通信，可以把几次反向的梯度累加起来，只平均一次。这里一次反向在 <code>with ddp.no_sync():</code> 之内，"
        "一次在外面。第一次发出了 {num_passes} 次集合通信，每个 rank 留着自己的梯度；第二次把两者之和取了平均：",
        "first_backward": "no_sync 之后",
        "second_backward": "第二次反向单独的值",
        "no_sync_result": "之后，在本 rank 上",
        "unused_title": "没有用到的参数",
        "unused": "现在模型多了两个参数：<code>{lonely}</code> 只在 rank 0 上用到，<code>{spare}</code> 哪里都没用。"
        "最后一个桶的梯度后面还跟着几个<i>控制字</i>，每个 rank 在其中说明自己用了什么。于是每个 rank 都知道："
        "<code>{lonely}</code> 被 {nproc} 个 rank 中的 {lonely_used} 个用到，没用到的按零计算；"
        "<code>{spare}</code> 被 {spare_used} 个用到，所以它的梯度保持原样：<code>None</code>。不需要任何开关，也不会有人卡住。",
        "where_title": "时间花在哪里",
        "where": "下面是每个 rank 在两次同步之间自己需要的时间（最近 {num_passes} 次的中位数）：等数据、前向与损失、"
        "反向（到自己的最后一个梯度为止）、优化器。每次同步时 rank 们都要互相等待，所以最慢的那个决定速度。",
        "late": "rank {rank} 比其他的多用 {delay}，主要在“{phase}”阶段。引擎无法把这段时间赢回来；请看看这个 rank 在那里做什么。",
        "not_late": "没有哪个 rank 明显拖慢其他的。",
        "exposed_much": "一步 {step} 中，进程等待了 {exposed}。要减少等待：用更大的批量或 <code>no_sync</code>（同样多的样本，"
        "更少的同步）、<code>gradsync.bf16_compress_hook</code>（字节减半）、更快的后端（单机用 <code>shm</code>，GPU 用 NCCL），"
        "或者换一个 <code>bucket_cap_mb</code>。",
        "exposed_little": "一步 {step} 中，进程只等待了 {exposed}：在这里，更快的通信带不来多少好处。",
        "made": "由 <code>{command}</code> 生成，gradsync {version}，torch {torch}。",
        "phase_data": "等数据",
        "phase_forward": "前向",
        "phase_backward": "反向",
        "phase_optimizer": "优化器",
        "verdict_hidden": "{total} 的通信中有 {hidden} 被掩盖",
        "verdict_bucket": "桶 {bucket} 占暴露时间的 {share}，里面最大的是 {name}",
        "verdict_late": "rank {rank} 在{phase}阶段慢了 {delay}",
    },
}
