//! Attention of tensors that candle keeps on a GPU, launched on candle's stream.
//!
//! [`GpuStorage`] is what a device of candle has to offer. `cuda` implements it for candle's CUDA device, `rocm` for the
//! ROCm device of candle's pull request 3801.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Layout, Storage, Tensor};

use super::{run, Workspace};
use crate::arguments::{Options, Sizes, Varlen};
use crate::driver::{Kernels, Platform, Stream};
use crate::error::{argument, Error, Result};
use crate::launch::{Backward, Dtype, Forward, Memory, Operand, Pages, Shape, Sources, Step};
use crate::store::Stores;

/// Storage of candle in a GPU's memory.
pub(crate) trait GpuStorage: BackendStorage<Device: BackendDevice<Storage = Self>> {
    /// Whose driver launches.
    const PLATFORM: Platform;

    /// The number of the tensor's GPU.
    fn ordinal(&self) -> usize;

    /// The handle of the stream on which candle uses the tensor, as a number.
    fn stream(&self) -> usize;

    /// Device address of the first element. Later work on the stream waits for earlier writes to
    /// the tensor, and later writes wait for the work that is on the stream then.
    fn address(&self) -> Result<u64>;

    /// Tells candle that work on the stream writes to the tensor.
    fn written(&mut self) -> Result<()>;

    /// The storage of a tensor, if it is of this kind.
    fn of(storage: &Storage) -> Option<&Self>;

    /// As the storage of a tensor.
    fn into_storage(self) -> Storage;

    /// The tensor's device, in the type that candle's functions take.
    fn candle_device(&self) -> Device;
}

/// A stream, its GPU's kernels, and its scratch memory.
struct Lane {
    platform: Platform,
    ordinal: usize,
    stream: Stream,
    kernels: Arc<Kernels>,
    workspace: Workspace,
}

thread_local! {
    /// The streams that this thread has launched on. Other threads have workspaces of their own: candle computes on
    /// "the stream of the thread that calls", which is one handle for many streams.
    static LANES: RefCell<Vec<Lane>> = const { RefCell::new(Vec::new()) };
}

/// The kernels of a GPU from the store named by the environment variable. Opens each GPU only once.
fn open(platform: Platform, ordinal: usize) -> Result<Arc<Kernels>> {
    static OPEN: Mutex<BTreeMap<(Platform, usize), Arc<Kernels>>> = Mutex::new(BTreeMap::new());
    let mut opened = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = opened.get(&(platform, ordinal)) {
        return Ok(found.clone());
    }
    let found = Arc::new(Kernels::open(platform, ordinal, &Stores::from_environment()?)?);
    opened.insert((platform, ordinal), found.clone());
    Ok(found)
}

/// Plans steps and launches them on the stream of a tensor.
///
/// # Safety
///
/// The addresses of the plan are of tensors that live until the stream has come there; candle frees memory in the order
/// of the stream.
unsafe fn launch<S: GpuStorage>(
    near: &S,
    plan: impl FnOnce(Sources<'_>, &mut dyn Memory) -> Result<Vec<Step>>,
) -> Result<()> {
    let (platform, ordinal, handle) = (S::PLATFORM, near.ordinal(), near.stream());
    LANES.with_borrow_mut(|lanes| {
        let known = |lane: &Lane| (lane.platform, lane.ordinal, lane.stream.handle()) == (platform, ordinal, handle);
        let index = if let Some(index) = lanes.iter().position(known) {
            index
        } else {
            let kernels = open(platform, ordinal)?;
            let workspace = Workspace::new(kernels.gpu().clone());
            // SAFETY: the stream is used only in calls with a tensor of candle whose stream it is, and which keeps it.
            let stream = unsafe { kernels.gpu().foreign_stream(handle) };
            lanes.push(Lane { platform, ordinal, stream, kernels, workspace });
            lanes.len() - 1
        };
        let Lane { stream, kernels, workspace, .. } = &mut lanes[index];
        workspace.rewind();
        let steps = plan(kernels.sources(), workspace)?;
        // SAFETY: the caller's promise; the workspace is as large as the plan asked for.
        unsafe { run(kernels, stream, &steps) }
    })
}

/// A call without its tensors.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub sizes: &'a Sizes,
    pub options: &'a Options,
    pub varlen: Option<&'a Varlen>,
}

/// The optional tensors of a call, dense and on its GPU.
struct Indices {
    slopes: Option<Tensor>,
    seqlens: Option<(Tensor, Tensor)>,
    /// The block table and the lengths of the sequences of keys.
    pages: Option<(Tensor, Tensor)>,
}

impl Indices {
    fn new<S: GpuStorage>(call: Call<'_>, near: &S) -> Result<Self> {
        let there =
            |tensor: &Tensor| -> Result<Tensor> { Ok(tensor.to_device(&near.candle_device())?.force_contiguous()?) };
        let slopes = call.options.alibi_slopes.as_ref().map(there).transpose()?;
        let Some(varlen) = call.varlen else { return Ok(Self { slopes, seqlens: None, pages: None }) };
        let table = varlen.pages.as_ref().map(|pages| &pages.block_table);
        let on_the_host = |tensor: &Tensor| tensor.device().is_cpu();
        if [&varlen.seqlens_q, &varlen.seqlens_k].into_iter().chain(table).all(on_the_host) {
            varlen.sequences(call.sizes)?; // checks values, which costs no wait for the GPU
        }
        let pages = match table {
            None => None,
            Some(table) => {
                let batch = varlen.batch()?;
                let ends = varlen.seqlens_k.narrow(0, 1, batch)?;
                let lengths = (ends - varlen.seqlens_k.narrow(0, 0, batch)?)?;
                Some((there(table)?, there(&lengths)?))
            }
        };
        let starts_q = there(&varlen.seqlens_q)?;
        // Equal addresses mean that each sequence has as many keys as queries.
        let shared = varlen.seqlens_q.id() == varlen.seqlens_k.id();
        let starts_k = if shared { starts_q.clone() } else { there(&varlen.seqlens_k)? };
        Ok(Self { slopes, seqlens: Some((starts_q, starts_k)), pages })
    }

    /// The call's shape, with the addresses of the index tensors.
    fn shape<S: GpuStorage>(&self, call: Call<'_>, dtype: Dtype) -> Result<Shape> {
        let Sizes { batch, seqlen_q, seqlen_k, heads, heads_k, dim, .. } = *call.sizes;
        let scale = call.options.softmax_scale;
        let mut shape = Shape::dense(dtype, batch, (seqlen_q, seqlen_k), (heads, heads_k), dim, scale);
        shape.softcap = call.options.cap();
        if let Some(slopes) = &self.slopes {
            shape.alibi_slopes = address::<S>(slopes)?;
        }
        if let (Some(varlen), Some((starts_q, starts_k))) = (call.varlen, &self.seqlens) {
            shape.batch = varlen.batch()?;
            (shape.total_q, shape.total_k) = (seqlen_q, seqlen_k);
            (shape.seqlen_q, shape.seqlen_k) = (varlen.max_seqlen_q, varlen.max_seqlen_k);
            (shape.cu_seqlens_q, shape.cu_seqlens_k) = (address::<S>(starts_q)?, address::<S>(starts_k)?);
        }
        (shape.window_left, shape.window_right) = call.options.window(shape.seqlen_q, shape.seqlen_k);
        Ok(shape)
    }
}

/// Device address of a dense tensor.
fn address<S: GpuStorage>(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    stored::<S>(&storage)?
        .address()
        .map(|start| start + (layout.start_offset() * tensor.dtype().size_in_bytes()) as u64)
}

fn stored<S: GpuStorage>(storage: &Storage) -> Result<&S> {
    S::of(storage).ok_or_else(|| {
        Error::WrongDevice("q, k, v, and their gradients have to be on one device: move them with to_device".into())
    })
}

/// A tensor `(batch, rows, heads, head_dim)` or `(rows, heads, head_dim)` as kernels take it.
fn operand<S: GpuStorage>(name: &'static str, storage: &S, layout: &Layout) -> Result<Operand> {
    let (batch, row, head) = match *layout.stride() {
        [batch, row, head, 1] => (batch, row, head),
        [row, head, 1] => (0, row, head),
        _ => {
            let found = format!("shape {:?} with strides {:?}", layout.shape(), layout.stride());
            return argument(name, found, "rank 3 or 4 and a dense head dim: call contiguous()");
        }
    };
    let start = layout.start_offset() * storage.dtype().size_in_bytes();
    Ok(Operand { address: storage.address()? + start as u64, batch, row, head })
}

/// A new, uninitialised tensor on the device of `near`. A kernel must write all its elements.
fn empty<S: GpuStorage>(near: &S, shape: &candle_core::Shape, dtype: DType) -> Result<S> {
    // SAFETY: the caller launches a kernel that writes every element before anybody reads one.
    Ok(unsafe { near.device().alloc_uninit(shape, dtype)? })
}

fn dtype_of(dtypes: [DType; 3]) -> Result<Dtype> {
    match dtypes {
        [DType::F16, DType::F16, DType::F16] => Ok(Dtype::F16),
        [DType::BF16, DType::BF16, DType::BF16] => Ok(Dtype::Bf16),
        [DType::F32, DType::F32, DType::F32] => Ok(Dtype::F32),
        [q, k, v] => {
            let found = format!("dtypes {q:?}, {k:?} and {v:?}");
            argument("q, k and v", found, "one of F16, BF16 and F32, the same for all")
        }
    }
}

/// The forward: the result, dense, and, where a caller `keeps` them for a backward, the logarithms of the sums in the
/// layout of the kernels.
pub(crate) fn forward<S: GpuStorage>(
    call: Call<'_>,
    tensors: [(&S, &Layout); 3],
    keeps: bool,
) -> Result<(S, Option<Tensor>)> {
    let [(q, q_l), (k, k_l), (v, v_l)] = tensors;
    if call.varlen.and_then(|varlen| varlen.pages.as_ref()).is_some_and(|pages| pages.mm_prefix_ranges.is_some()) {
        let reason = "mm_prefix_ranges: the GPU kernels have none. Leave them out, or pass CPU tensors";
        return Err(Error::Unsupported(reason.into()));
    }
    let dtype = dtype_of([q.dtype(), k.dtype(), v.dtype()])?;
    let indices = Indices::new(call, q)?;
    let shape = indices.shape::<S>(call, dtype)?;
    let elements = shape.lse_elements();
    let mut out = empty(q, q_l.shape(), q.dtype())?;
    let mut lse = if keeps { Some(empty(q, &elements.into(), DType::F32)?) } else { None };
    let pages = match &indices.pages {
        None => None,
        Some((table, _)) => {
            let columns = table.dims()[1];
            Some(Pages { table: address::<S>(table)?, stride: columns, columns, size: call.sizes.page_size })
        }
    };
    let mut planned = Forward {
        shape,
        q: operand("q", q, q_l)?,
        k: operand("k", k, k_l)?,
        v: operand("v", v, v_l)?,
        out: operand("out", &out, &Layout::contiguous(q_l.shape()))?,
        lse: lse.as_ref().map_or(Ok(0), S::address)?,
        pages,
        lengths: indices.pages.as_ref().map_or(Ok(0), |(_, lengths)| address::<S>(lengths))?,
    };
    // SAFETY: every address is of a tensor above. Each is as large as the shape says, which `Sizes` has checked; starts
    // of sequences and pages that lie on the GPU are the caller's, as in candle-flash-attn.
    unsafe {
        launch(q, |sources, memory| {
            if !keeps {
                planned.lse = memory.allocate(elements * size_of::<f32>())?; // the kernels write them in any case
            }
            sources.forward(&planned, memory)
        })?;
    }
    out.written()?;
    lse.as_mut().map_or(Ok(()), S::written)?;
    for (storage, _) in tensors {
        storage.address()?; // those who write there later wait
    }
    let lse = lse.map(|lse| Tensor::from_storage(lse.into_storage(), elements, BackpropOp::none(), false));
    Ok((out, lse))
}

/// The gradients of q, k and v. `tensors` are q, k, v, the result and its gradient.
pub(crate) fn backward<S: GpuStorage>(
    call: Call<'_>,
    tensors: [&Tensor; 5],
    lse: Option<Tensor>,
) -> Result<[Tensor; 3]> {
    let locked = tensors.map(Tensor::storage_and_layout);
    let mut found = Vec::with_capacity(tensors.len());
    for (storage, layout) in &locked {
        found.push((stored::<S>(storage)?, *layout));
    }
    let [(q, q_l), (k, k_l), (v, v_l), (out, out_l), (dout, dout_l)] =
        [found[0], found[1], found[2], found[3], found[4]];
    let lse = match lse {
        Some(lse) => Some(lse),
        None => forward(call, [(q, q_l), (k, k_l), (v, v_l)], true)?.1,
    };
    let dtype = dtype_of([q.dtype(), k.dtype(), dout.dtype()])?;
    let indices = Indices::new(call, q)?;
    let shape = indices.shape::<S>(call, dtype)?;
    let dense = |near: &S, layout: &Layout| -> Result<(S, Operand)> {
        let made = empty(near, layout.shape(), near.dtype())?;
        let operand = operand("gradient", &made, &Layout::contiguous(layout.shape()))?;
        Ok((made, operand))
    };
    let ((dq, dq_o), (dk, dk_o), (dv, dv_o)) = (dense(q, q_l)?, dense(k, k_l)?, dense(v, v_l)?);
    let planned = Backward {
        shape,
        dout: operand("dout", dout, dout_l)?,
        q: operand("q", q, q_l)?,
        k: operand("k", k, k_l)?,
        v: operand("v", v, v_l)?,
        out: operand("out", out, out_l)?,
        lse: lse.as_ref().map_or(Ok(0), address::<S>)?,
        dq: dq_o,
        dk: dk_o,
        dv: dv_o,
        dsinks: 0,
        dbias: 0,
    };
    // SAFETY: as in `forward`.
    unsafe {
        launch(q, |sources, memory| sources.backward(&planned, memory))?;
    }
    for (storage, _) in found {
        storage.address()?;
    }
    let finished = [(dq, q_l), (dk, k_l), (dv, v_l)].map(|(mut storage, layout)| -> Result<Tensor> {
        storage.written()?;
        Ok(Tensor::from_storage(storage.into_storage(), layout.shape().clone(), BackpropOp::none(), false))
    });
    let [dq, dk, dv] = finished;
    Ok([dq?, dk?, dv?])
}
