//! The one matrix product of the CPU kernels, written so that the compiler keeps its tile in vector registers.

/// Columns of a product come in multiples of this number.
pub(super) const LANES: usize = 16;

/// Rows of the tile that the inner loop keeps in registers.
const ROWS: usize = 4;

/// How the left factor of a product lies in memory.
#[derive(Clone, Copy)]
pub(super) enum Left<'a> {
    /// Row-major: element `(i, p)` is at `i * stride + p`.
    Rows(&'a [f32], usize),
    /// Column-major: element `(i, p)` is at `p * stride + i`.
    Columns(&'a [f32], usize),
}

/// `a * b + c`, fused where the processor has an instruction for it.
#[inline(always)]
fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// `c [m, n] += a [m, k] * b [k, n]`; b and c are row-major and dense, n is a multiple of [`LANES`].
#[inline(always)]
pub(super) fn add_product<const FMA: bool>(c: &mut [f32], a: Left<'_>, b: &[f32], (m, n, k): (usize, usize, usize)) {
    let whole = m / ROWS * ROWS;
    for column in (0..n).step_by(LANES) {
        for row in (0..whole).step_by(ROWS) {
            add_tile::<FMA, ROWS>(c, a, b, (row, column), (n, k));
        }
        for row in whole..m {
            add_tile::<FMA, 1>(c, a, b, (row, column), (n, k));
        }
    }
}

#[inline(always)]
fn add_tile<const FMA: bool, const R: usize>(
    c: &mut [f32],
    a: Left<'_>,
    b: &[f32],
    (row, column): (usize, usize),
    (n, k): (usize, usize),
) {
    let mut tile = [[0.0f32; LANES]; R];
    match a {
        Left::Rows(data, stride) => {
            let rows: [&[f32]; R] = std::array::from_fn(|r| &data[(row + r) * stride..][..k]);
            for p in 0..k {
                let b_row = &b[p * n + column..][..LANES];
                for r in 0..R {
                    let value = rows[r][p];
                    for lane in 0..LANES {
                        tile[r][lane] = multiply_add::<FMA>(value, b_row[lane], tile[r][lane]);
                    }
                }
            }
        }
        Left::Columns(data, stride) => {
            for p in 0..k {
                let b_row = &b[p * n + column..][..LANES];
                let values = &data[p * stride + row..][..R];
                for r in 0..R {
                    for lane in 0..LANES {
                        tile[r][lane] = multiply_add::<FMA>(values[r], b_row[lane], tile[r][lane]);
                    }
                }
            }
        }
    }
    for (r, values) in tile.iter().enumerate() {
        let target = &mut c[(row + r) * n + column..][..LANES];
        for lane in 0..LANES {
            target[lane] += values[lane];
        }
    }
}

/// Multiplies each value by a factor.
#[inline(always)]
pub(super) fn scale(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

/// `exp(x)` for `x <= 88`, within 2e-7 of its value; 0 below -87.3, NaN for NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding this number leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let y = x * std::f32::consts::LOG2_E;
    let rounded = y + ROUND;
    let whole = rounded - ROUND;
    // The rest in natural units, with ln 2 in two pieces so that nothing is lost for large x.
    let r = (x - whole * 0.693_359_4) - whole * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + coefficient;
    }
    let value = (p * r * r + r) + 1.0;
    let power = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
    if y < -126.0 {
        0.0
    } else {
        value * power
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_library() {
        for step in -880_000..=880_000 {
            let x = step as f32 * 1e-4;
            let exact = f64::from(x).exp();
            let found = f64::from(exp(x));
            if x > -87.3 {
                assert!((found - exact).abs() <= 2e-7 * exact, "exp({x}) = {found}, wanted {exact}");
            } else {
                assert!(found.abs() <= 1.3e-38, "exp({x}) = {found}");
            }
        }
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn products_of_both_layouts_agree_with_the_definition() {
        let (m, n, k) = (7, 32, 5);
        let value = |i: usize| ((i * 37 + 11) % 23) as f32 - 11.0;
        let a: Vec<f32> = (0..m * k).map(value).collect();
        let turned: Vec<f32> = (0..m * k).map(|i| a[i % m * k + i / m]).collect();
        let b: Vec<f32> = (0..k * n).map(|i| value(i + 3)).collect();
        let wanted: Vec<f32> =
            (0..m * n).map(|i| 1.0 + (0..k).map(|p| a[i / n * k + p] * b[p * n + i % n]).sum::<f32>()).collect();
        for left in [Left::Rows(&a, k), Left::Columns(&turned, m)] {
            for fused in [false, true] {
                let mut c = vec![1.0; m * n];
                if fused {
                    add_product::<true>(&mut c, left, &b, (m, n, k));
                } else {
                    add_product::<false>(&mut c, left, &b, (m, n, k));
                }
                assert_eq!(c, wanted);
            }
        }
    }
}
